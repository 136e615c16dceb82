"""Commands for a federation's operator: provision, server, members, operators, app, bundle."""
