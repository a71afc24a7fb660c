"""One page that tells a whole run, or several side by side: what was learnt, what likelihood did, what was written."""

from llds.report.comparison import comparison_page
from llds.report.record import Record, read_record
from llds.report.run import run_page

__all__ = ["Record", "comparison_page", "read_record", "run_page"]
