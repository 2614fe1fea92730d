"""Results of a run: events, summary, page and pictures."""

from laconic.tools.report.ledger import Ledger as Ledger
from laconic.tools.report.publish import check_packages as check_packages
from laconic.tools.report.publish import publish as publish

__all__ = ["Ledger", "check_packages", "publish"]
