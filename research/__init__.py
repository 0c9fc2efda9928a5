"""What stands behind the verdicts: checks of the ledger, studies of trained models. In no distribution."""
