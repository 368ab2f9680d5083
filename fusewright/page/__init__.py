"""The report that people look at: records as one HTML page that opens offline, or as pictures."""

from fusewright.page.document import charts_png, load_records, render

__all__ = ["charts_png", "load_records", "render"]
