"""The folder of the builders is on the path of these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
