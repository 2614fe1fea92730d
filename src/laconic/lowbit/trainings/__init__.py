"""What `laconic train --lowbit` takes: each file is a registered name."""
