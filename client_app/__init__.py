"""The site's side of FedVeil, as a Flower ClientApp."""
