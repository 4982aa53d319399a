"""The report of a sweep: verified records in; tables, figures and a page out."""
