"""Expert placement over edge servers: which server holds which experts, and when to migrate."""
