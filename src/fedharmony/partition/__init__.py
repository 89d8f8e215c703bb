"""Dividing training images among clients, and measuring what a division does."""
