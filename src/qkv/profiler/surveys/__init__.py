"""Survey a model's attention over a corpus, in shards whose statistics merge exactly.

It imports capture and data. Read `survey.py`, then `surveyor.py`.
"""
