"""Turn verified records into tables, figures and a page, and test a paper's claims on them."""
