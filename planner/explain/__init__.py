"""Why a plan is what it is: what binds, what each resource and decision is worth."""
