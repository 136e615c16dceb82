"""Sphinx's settings: `make docs`. Nothing of the site comes from elsewhere when it is read."""

project, author, copyright = "FedVeil", "the FedVeil authors", "the FedVeil authors"
extensions = ["myst_parser"]
exclude_patterns = ["conf.py"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "FedVeil"
html_show_sphinx = False
html_copy_source = False
nitpicky = True
