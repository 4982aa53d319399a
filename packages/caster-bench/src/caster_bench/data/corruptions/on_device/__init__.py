"""The corruptions that pay on a GPU, in torch: imported only when `corrupt` is told a device."""
