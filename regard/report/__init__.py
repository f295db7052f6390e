"""Reports: pages with tables and pictures, each of which is one file that needs nothing else; figures for papers."""

from regard.report.heat import heads_grid, heat
from regard.report.page import Page, ReportError

__all__ = ["Page", "ReportError", "heads_grid", "heat"]
