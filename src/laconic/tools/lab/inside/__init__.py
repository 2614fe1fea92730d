"""Programs inside a lab; `lab.bare` starts them without torch."""
