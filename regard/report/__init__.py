"""Reports: what pages with tables and pictures are made of; each page is one file that needs nothing else."""

from regard.report.heat import heads_grid, heat
from regard.report.page import Page, ReportError

__all__ = ["Page", "ReportError", "heads_grid", "heat"]
