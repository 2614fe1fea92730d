"""Programs that run inside a lab; `laconic.lab.bare` starts them without torch."""
