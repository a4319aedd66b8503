"""Makes each Python run `tula.pth` at its start, as one does where Tula is installed: a lent machine has a checkout."""

import site
from pathlib import Path

site.addsitedir(str(Path(__file__).parents[3] / "agent"))
