"""Contains a folder for each scientific claim, with question, command and result; the product imports none of them."""
