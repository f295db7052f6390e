"""Reports: pages with tables and pictures, each one file that needs nothing else."""

from regard.report.heat import heads_grid, heat
from regard.report.knowledge import knowledge_page
from regard.report.page import Page, ReportError
from regard.report.runs import compare_page

__all__ = ["Page", "ReportError", "compare_page", "heads_grid", "heat", "knowledge_page"]
