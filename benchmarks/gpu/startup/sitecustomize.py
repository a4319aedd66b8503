"""Makes each Python run `tula.pth` at its start, as if Tula were installed, since the machine has only a checkout."""

import site
from pathlib import Path

site.addsitedir(str(Path(__file__).parents[3] / "agent"))
