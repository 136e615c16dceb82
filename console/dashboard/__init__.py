"""What goes on in a federation, or at a site, as pages in a browser on the same machine."""
