"""The lab: small models, trained on tasks whose truth is known, that show why attention does what it does."""
