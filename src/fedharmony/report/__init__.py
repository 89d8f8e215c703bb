"""What people see of a run: live progress, tables, and one self-contained page.

- :mod:`fedharmony.report.load` reads run and comparison folders.
- :mod:`fedharmony.report.tables` makes the table of the eight metrics (terminal, Markdown, CSV,
  LaTeX).
- :mod:`fedharmony.report.page` writes ``report.html`` from :mod:`fedharmony.report.words` and the
  panels, one file each, in :mod:`fedharmony.report.panels`; panels draw with
  :mod:`fedharmony.report.charts` and :mod:`fedharmony.report.svg`.
- :mod:`fedharmony.report.progress` follows a run while it happens.

Nothing here computes a result: every number shown was written by the run, is a mean, spread or
difference of such numbers, or is counted from the scores that it kept
(:mod:`fedharmony.report.measures`). This package imports nothing by itself, so that showing
progress loads nothing slow.
"""
