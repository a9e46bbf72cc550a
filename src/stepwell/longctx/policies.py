from stepwell.longctx.policy import Mode, Policy
def named(name): return {"exact": Policy("exact", Mode.EXACT, page_tokens=16, window=64)}[name]
