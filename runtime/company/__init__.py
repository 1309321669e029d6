"""The processes that run one plan together: how they are started, how they speak, and who ends them when one is lost."""
