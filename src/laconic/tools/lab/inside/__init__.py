"""Programs that run inside a lab; `laconic.tools.lab.bare` starts them without torch."""
