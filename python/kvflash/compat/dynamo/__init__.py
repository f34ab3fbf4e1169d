"""Dynamo's Python names: ``python -m kvflash.compat.dynamo SCRIPT`` runs a script with them."""
