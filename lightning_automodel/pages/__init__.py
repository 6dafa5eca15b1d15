"""Pages of one file, which load nothing: templates with style and script, tables, charts; of no plan and no run."""

from lightning_automodel.pages.bars import Bar, Bars, Segment
from lightning_automodel.pages.charts import Chart, Line
from lightning_automodel.pages.page import render, save
from lightning_automodel.pages.tables import Cell, Table
from lightning_automodel.pages.writable import check_folder

__all__ = ["Bar", "Bars", "Cell", "Chart", "Line", "Segment", "Table", "check_folder", "render", "save"]
