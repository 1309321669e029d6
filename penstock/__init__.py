"""Penstock: models larger than a machine's memory, streamed by a plan that is computed beforehand.

The folders ``planner``, ``runtime`` and ``conf`` lie at the top of the source tree; links beside this file make them this package's.
"""
