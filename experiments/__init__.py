"""Contains one folder per scientific claim, with the question, command and result; the product does not use them."""
