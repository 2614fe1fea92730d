"""What a run leaves behind: its events, a summary, a page to read and a picture."""

from laconic.report.ledger import Ledger as Ledger
from laconic.report.publish import check_packages as check_packages
from laconic.report.publish import publish as publish

__all__ = ["Ledger", "check_packages", "publish"]
