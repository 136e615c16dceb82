"""Commands for runs, such as submit, watch, report and audit."""
