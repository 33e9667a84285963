"""One schedule a file: `order()`, `placement()`, `closed_form()`."""
