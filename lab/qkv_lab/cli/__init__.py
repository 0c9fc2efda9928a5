"""The commands of qkv-lab: `qkv train`, `lab`, `check`, `experiment` and `claims`."""
