"""One folder for each scientific claim, with its question, command and result; the product never imports them."""
