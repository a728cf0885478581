"""``python -m servegym.hardware_profiles.measure`` is ``servegym measure``."""

from servegym._command_line import run_main
from servegym.hardware_profiles.measure.command import main

run_main(main)
