"""What must hold of records before a figure is made of them."""
