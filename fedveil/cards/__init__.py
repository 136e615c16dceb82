"""A run's privacy card: what each party saw, what is guaranteed against each party, and what is not protected."""
