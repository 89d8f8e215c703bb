"""The panels of the report page, one per file.

A panel is a class with a function that draws a section from loaded runs. Adding a file here, or a
plug-in that registers a panel, puts it on the page (:mod:`fedharmony.report.panel`).
"""
