"""Results of a run: its events, a summary, a page and pictures."""

from laconic.report.ledger import Ledger as Ledger
from laconic.report.publish import check_packages as check_packages
from laconic.report.publish import publish as publish

__all__ = ["Ledger", "check_packages", "publish"]
