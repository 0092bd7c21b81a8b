"""One self-contained HTML page that shows what a committed dataset is and whether to trust it.

:func:`make_report` verifies the dataset, reads its features once, and gives the page as text; see
README.md beside this file for what is on it and how the numbers are made. It needs the `probe`
extra (``pip install '.[probe]'`` in a checkout).
"""

from wllm_ray.report.build import Report, make_report

__all__ = ["Report", "make_report"]
