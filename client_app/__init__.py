"""The site side of FedVeil, as a Flower ClientApp."""
