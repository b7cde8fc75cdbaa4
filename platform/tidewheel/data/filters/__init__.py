"""The built-in filters: rules that drop, or edit, one document at a time."""
