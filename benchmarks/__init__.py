"""Benchmarks: `python -m benchmarks.NAME` runs one, `make docs` writes the pages from all results.

A benchmark is a folder:

    __main__.py      measures, and stores the results; its docstring says what and how
    results.jsonl    a row for each run, with its key: a stored run is not repeated; or
    results.json     one object, where all is measured in one go
    page.py          the page, or the part of one, in docs/

`common` has what benchmarks share, `pages` writes and checks the pages. Modules beside the folders are
short studies that store nothing, `gradient`, which writes the gradient that others are measured on, and
`losses`, which writes figures for `laconic plan`.
"""
