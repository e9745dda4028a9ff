"""Model families, one folder each. `models.registry` is the only module that names them."""
