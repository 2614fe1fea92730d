"""What runs inside a lab. Each file is a program, started by `laconic.lab.bare` without torch."""
