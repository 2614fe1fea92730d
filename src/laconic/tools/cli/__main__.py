"""Entry point of the `laconic` command: handles Ctrl-C before torch is imported."""

from __future__ import annotations

from laconic.tools.cli.startup import exit_on_interrupt


def main() -> None:
    exit_on_interrupt()
    from laconic.tools.cli.main import app

    app()


if __name__ == "__main__":
    main()
