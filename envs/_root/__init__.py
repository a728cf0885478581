"""servegym: environments and an agent zoo for LLM serving control."""
