"""Data sets: labelled images behind one small interface.

Sources, one file each: ``digits`` (made by the package), ``voc``, ``coco``, ``flair`` (with its
``flair_forms``) and ``table`` (images of your own). What they share: ``base`` (what a source and a
data set are), ``file_source`` (sources that read image files), ``tree`` (folders and archives as
one tree), ``cache`` (images decoded once), ``derived`` (files that are made of others),
``augment``, ``colour`` and ``transforms`` (changes of images).
"""
