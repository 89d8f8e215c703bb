"""What the server does round by round: it draws clients, asks them, and folds their replies."""
