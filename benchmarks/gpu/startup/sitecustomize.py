"""Makes every Python process run `tula.pth` when it starts, as if Tula were installed, not only checked out."""

import site
from pathlib import Path

site.addsitedir(str(Path(__file__).parents[3] / "agent"))
