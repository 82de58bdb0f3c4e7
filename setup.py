"""The README as a package index shows it, where links to files and pictures of the repository lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n", re.M)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")  # its text stays

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=LINK.sub(r"\1", PICTURE.sub("", readme)), long_description_content_type="text/markdown")
