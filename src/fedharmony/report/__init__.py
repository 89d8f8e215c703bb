"""What people see of a run: live progress, tables, figures, and one self-contained page.

- :mod:`fedharmony.report.load` reads run and comparison folders.
- :mod:`fedharmony.report.tables` makes the table of the eight metrics (terminal, Markdown, CSV,
  LaTeX).
- :mod:`fedharmony.report.plots` draws the figures as SVG text.
- :mod:`fedharmony.report.page` writes ``report.html``.
- :mod:`fedharmony.report.progress` follows a run while it happens.

Nothing here computes a result: every number shown was written by the run. This package imports
nothing by itself, so that showing progress does not load the plotting library.
"""
